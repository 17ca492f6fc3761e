"""What `kvmoverd doctor` looks at: checks of one node that read and try, and change nothing."""
