"""`omni-proxy import-nginx`: turns an nginx config into one of ours, and says what it could not carry over."""
