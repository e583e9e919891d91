"""What runs in the engines' own environments, and how it is run there."""
