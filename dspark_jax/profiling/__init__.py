"""What programs cost on a device before, and without, running them there."""
