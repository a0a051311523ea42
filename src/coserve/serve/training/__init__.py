"""Training: from a job in the database to a trained adapter."""
