"""What makes a checkpoint exist: attempts, the publish, and the catalog. Knows neither torch nor DCP."""
