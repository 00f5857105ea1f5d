import tests.torchvision_operators  # noqa: F401
