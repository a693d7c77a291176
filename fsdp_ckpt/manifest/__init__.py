"""What is on storage: the schema, typed JSON, and the version gate. Knows neither torch nor storage."""
