"""Text to batches: `tokenizer`, `text` (documents and their split), `packing` (rows), `synthetic`."""
