"""The walk through the model and back."""
