"""Real trainers on tiny models: built twice, run with and without the backend, compared."""
