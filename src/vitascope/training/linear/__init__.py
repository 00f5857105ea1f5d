"""Classifiers on frozen features: their fit, their choice by cross-validation, the head that they become."""
