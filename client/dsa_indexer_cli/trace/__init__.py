"""What a trace file says about steps, as a timeline for people and for Perfetto."""
