"""Programs that measure how heads learn, and what training costs."""
