"""How drafts are scored: the losses by name, the weights of the steps, and the teacher of a batch."""
