"""What a run says of itself: before it starts, while it goes on, and when it is finished."""
