"""What users speak to: OpenAI-compatible HTTP, text in and text out."""
