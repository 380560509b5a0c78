"""What a plan, a schedule or a prediction looks like: text for a terminal, SVG, Chrome trace. No torch, no terminal."""
