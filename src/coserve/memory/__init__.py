"""Who owns which bytes."""
