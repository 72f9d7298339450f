"""OpenAI's APIs: completions, responses, embeddings, transcriptions, models."""
