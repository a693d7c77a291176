"""Images: page-aligned host buffers laid out as the shard file. Knows neither storage nor ranks."""
