"""Text -> corpus -> batches.

prepare     the command: text to a corpus of token ids
sdists      text of source distributions: download, choice of files, shared passages
sources     files, folders, URLs, datasets of the Hugging Face hub, the standard library
tokenizer   bytes to ids and back
loader      reading a corpus; batches as a pure function of the step
tasks       generated documents with questions: retrieval, algorithms
"""
