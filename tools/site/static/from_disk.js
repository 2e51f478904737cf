// A page that was opened from disk may not fetch others, so the search shows no lines of them.
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
