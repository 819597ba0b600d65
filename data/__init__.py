"""Text -> corpus -> batches.

prepare     the command: text to a corpus of token ids
sources     text files, JSON lines, Parquet, the standard library
remote      URLs and datasets of the Hugging Face hub
tokenizer   bytes to ids and back
bpe         learning a byte pair encoding
encode      documents to ids, on all cores
journal     an interrupted preparation resumes
loader      a corpus, verified; batches as a pure function of the step
passkey     documents that hide a key
"""
