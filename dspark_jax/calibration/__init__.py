"""How far a drafter's confidences can be trusted, and temperatures that make them true (section 3)."""
