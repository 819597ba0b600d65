"""Hugging Face folders, read and written: no pickle is read, no code is run, and only hub.py downloads.

architectures     what each architecture can express, and the names of its tensors and fields
pretrained        loading a folder as a model
export            writing a model as a folder
hub               models of the hub: pulled and pushed
rope_parameters   rotary scalings in config.json
tokenizer         the tokenizer of a folder, read and written
"""
