"""What server and nodes send each other, as frames of bytes."""
