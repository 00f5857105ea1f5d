"""Images in: data sets, the one preprocessing, augmentation, order."""
