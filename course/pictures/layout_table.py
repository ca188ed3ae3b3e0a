"""The old place of a function, until notebook 01 imports it from `course.pictures.style`."""

from course.pictures.style import bytes_text as bytes_text
