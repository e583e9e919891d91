"""What drafts are scored with: the losses by name, the weights of the steps, and what the target says of a batch."""
