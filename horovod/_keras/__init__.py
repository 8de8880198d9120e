"""The common part of `horovod.tensorflow.keras` and `horovod.keras`.

It serves Keras 3 on the TensorFlow, torch and JAX backends, and Keras 2 as the package tf-keras.
Nothing here imports TensorFlow, JAX or a Keras before it is given one of their objects.
"""
