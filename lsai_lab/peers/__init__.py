"""The same training with other people's trainers: what the `peer` kind starts, each in processes of its own.

config             what a run is, and which packages it needs
hf, hf_train       the Hugging Face Trainer: how it is started, its arguments; the training itself
titan, titan_train torchtitan: its command line, tokenizer and text; the training itself
watch              step times, losses and memory of a trainer that does not know it is watched
worker             the process that trains: `python -m lsai_lab.peers.worker`
run                the kind: starting it (`lsai_lab.launch`), and what came out
"""
