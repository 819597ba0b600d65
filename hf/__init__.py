"""Hugging Face folders, in both directions: no pickle is read, no code is run, nothing is fetched.

architectures     which architecture equals which config, and the names of their tensors
pretrained        a folder as a model of this repository
export            a run as a folder
rope_parameters   rotary scalings as config.json writes them
tokenizer         tokenizer.json
"""
