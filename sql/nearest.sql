-- The ten rows nearest to one row by cosine.
SELECT other.id, other.label, array_cosine_similarity(one.embedding, other.embedding) AS similarity
FROM digit_embeddings AS one
JOIN digit_embeddings AS other ON other.id <> one.id
WHERE one.id = 0
ORDER BY similarity DESC
LIMIT 10
