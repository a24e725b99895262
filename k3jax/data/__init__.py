"""Text to batches: `tokenizer`, `text` (documents, split), `packing` (rows), `synthetic`."""
