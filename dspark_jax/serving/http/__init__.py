"""The HTTP server: OpenAI's completions over one engine, streamed or whole, with metrics and a page."""
