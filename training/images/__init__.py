"""Images of conversations, for targets that see: how records name them, and how the target's processor reads them."""
