"""What happens in a run, and what will: bytes, stalls, lost updates."""
