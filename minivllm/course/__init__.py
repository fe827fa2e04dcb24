"""What makes the package a course: chapters, exercises, your files in place of the package's."""
