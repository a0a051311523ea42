"""What is kept, accounted for, planned and shared, against what others keep and what was promised."""
