"""What is computed from what engines tell, beside it: objectives, saturation, hit rates."""
