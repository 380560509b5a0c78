"""Weights in and out: Hugging Face folders (`pretrained`), first weights (`initial`), and what both stand on."""
