"""x"""
from workshop.exercises.exercise import Exercise

EXERCISES: list[Exercise] = []
