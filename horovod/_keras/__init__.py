"""What `horovod.tensorflow.keras` and `horovod.keras` have in common.

It serves Keras 3 on the TensorFlow, torch and JAX backends, and Keras 2 as the package tf-keras.
Nothing here imports TensorFlow, JAX or a Keras before an object of theirs is at hand.
"""
