"""Text -> corpus -> batches.

prepare     the command: text to a corpus of token ids
sources     files, folders, URLs, datasets of the Hugging Face hub, the standard library
tokenizer   bytes to ids and back
pieces      cutting long documents for encoding
loader      reading a corpus; batches as a pure function of the step
training_positions   the positions of a batch in training: plain, PoSE, random
tasks       generated documents with questions: retrieval, algorithms
"""
