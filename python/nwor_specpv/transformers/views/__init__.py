"""What partial steps attend to, when they pay, and a log of them."""
