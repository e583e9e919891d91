"""Servers with OpenAI's protocol: the client, and what vLLM's server adds for hidden states."""
