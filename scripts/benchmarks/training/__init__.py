"""Programs that measure how heads learn, and the speed of training steps."""
