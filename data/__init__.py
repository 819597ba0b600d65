"""Text -> corpus -> batches.

prepare     the command: text to a corpus of token ids
sources     text files, JSON lines, Parquet, the standard library
remote      URLs and datasets of the Hugging Face hub
tokenizer   bytes to ids and back
tokenizer_json   tokenizers of Hugging Face folders
pieces      cutting long documents for encoding
bpe         learning a byte pair encoding
encode      documents to ids, on all cores
journal     an interrupted preparation resumes
integrity   whether the files of a corpus are unchanged
loader      reading a corpus; batches as a pure function of the step
training_positions   the positions of a batch in training: plain, PoSE, random, RFS
tasks       generated documents with questions: retrieval, algorithms
"""
