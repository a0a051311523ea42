"""Memory plans: what a model will take, known before it is loaded, and measured where that is asked for."""
