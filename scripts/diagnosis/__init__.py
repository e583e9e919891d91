"""Why heads accept as little as they do: what is measured, what is wrong, and the page that says it."""
