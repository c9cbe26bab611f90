"""What is the case at one moment. Nothing here decides or changes anything."""
