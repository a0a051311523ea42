"""Training jobs: from the database to a trained adapter."""
