"""Between live models and Hugging Face files. Called by every rank; knows neither the manager nor runs."""
