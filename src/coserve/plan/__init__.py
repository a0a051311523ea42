"""Memory plans: estimates of a model's memory before it is loaded, and measurements to compare them with."""
