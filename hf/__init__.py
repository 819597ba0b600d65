"""Hugging Face folders, read and written: no pickle is read, and no code is run.

architectures     what each architecture can express, and the names of its tensors and fields
pretrained        loading a folder, or a model of the hub, as a model
export            writing a model as a folder
rope_parameters   rotary scalings in config.json
tokenizer         the tokenizer of a folder, read and written
lm_eval           tasks of lm-evaluation-harness on any run: python -m hf.lm_eval RUN --tasks ...
"""
